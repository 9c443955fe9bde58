"""/v1/files: what is uploaded is kept as it came, listed, shown, given back and forgotten."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.server.batches.endpoints import Batches
from ridgeline.server.batches.multipart import MultipartReader, PartBegins, PartData, PartEnds, boundary_of
from ridgeline.server.batches.store import BatchStore
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.records.state import StateStore
from tests.server.stage import Stage

LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path / "state")
    yield store
    store.close()


@pytest.fixture
async def stage(state: StateStore) -> Stage:
    return Stage(state=state)


@pytest.fixture
async def http(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with stage.http() as client:
        yield client


async def upload(http: httpx.AsyncClient, content: bytes = LINES, name: str = "in.jsonl", **data: str) -> Any:
    files = {"file": (name, content)}
    return await http.post("/v1/files", files=files, data={"purpose": "batch"} | data)


def kept_files(state: StateStore) -> list[str]:
    return sorted(path.name for path in (state.folder / "files").iterdir())


class TestKeeping:
    async def test_a_file_comes_back_as_it_was_sent(self, http: httpx.AsyncClient) -> None:
        file = (await upload(http)).json()
        assert file["object"] == "file"
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(LINES), "in.jsonl", "batch")
        assert file["expires_at"] == file["created_at"] + 30 * 24 * 3600
        assert (await http.get(f"/v1/files/{file['id']}")).json() == file
        assert (await http.get(f"/v1/files/{file['id']}/content")).content == LINES

    @pytest.mark.parametrize("size", [0, 1, 300_000])
    async def test_every_byte_counts(self, http: httpx.AsyncClient, size: int) -> None:
        content = (b"\r\n--\r\n\x00\xff" * (size // 8 + 1))[:size]
        file = (await upload(http, content)).json()
        assert file["bytes"] == size
        assert (await http.get(f"/v1/files/{file['id']}/content")).content == content

    async def test_it_may_expire_sooner(self, http: httpx.AsyncClient) -> None:
        options = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(http, **options)).json()
        assert file["expires_at"] == file["created_at"] + 3600

    async def test_a_path_in_its_name_is_left_out(self, http: httpx.AsyncClient, state: StateStore) -> None:
        file = (await upload(http, name="../../etc/pass wd.jsonl")).json()
        assert file["filename"] == "pass wd.jsonl"
        assert kept_files(state) == [file["id"]]

    async def test_deleted_it_is_gone_from_the_disk_too(
        self, http: httpx.AsyncClient, state: StateStore
    ) -> None:
        file_id = (await upload(http)).json()["id"]
        assert (await http.delete(f"/v1/files/{file_id}")).json() == {
            "id": file_id,
            "object": "file",
            "deleted": True,
        }
        assert kept_files(state) == []
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            answer = await http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["param"] == "file_id"

    async def test_lists_go_page_by_page_in_either_order(self, http: httpx.AsyncClient) -> None:
        ids = [(await upload(http)).json()["id"] for _ in range(5)]
        other = (await upload(http, purpose="user_data")).json()["id"]
        newest = (await http.get("/v1/files", params={"limit": 2})).json()
        assert [file["id"] for file in newest["data"]] == [other, ids[4]]
        assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (other, ids[4], True)
        rest = (await http.get("/v1/files", params={"after": ids[4]})).json()
        assert [file["id"] for file in rest["data"]] == ids[3::-1]
        assert not rest["has_more"]
        oldest = (await http.get("/v1/files", params={"order": "asc", "purpose": "batch"})).json()
        assert [file["id"] for file in oldest["data"]] == ids

    async def test_what_was_being_written_when_the_server_ended_is_removed(
        self, http: httpx.AsyncClient, state: StateStore
    ) -> None:
        file_id = (await upload(http)).json()["id"]
        (state.folder / "files" / "file-stray").write_bytes(b"half")
        await BatchStore(state).stored_bytes()  # the next server's first look
        assert kept_files(state) == [file_id]

    async def test_an_expired_file_is_swept_and_others_are_not(
        self, http: httpx.AsyncClient, stage: Stage, state: StateStore
    ) -> None:
        sooner = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        short = (await upload(http, **sooner)).json()
        long = (await upload(http)).json()
        await stage.served_models.part(Batches).store.sweep(short["expires_at"] + 1, 0)
        assert kept_files(state) == [long["id"]]
        assert (await http.get(f"/v1/files/{short['id']}")).status_code == 404


class TestRefusals:
    @pytest.mark.parametrize(
        ("files", "data", "param"),
        [
            ({"file": ("a", b"x")}, {}, "purpose"),
            ({"file": ("a", b"x")}, {"purpose": "batch_output"}, "purpose"),
            ({"file": ("a", b"x")}, {"purpose": "batch", "colour": "red"}, "colour"),
            ({"file": ("a", b"x")}, {"purpose": "batch" * 300}, "purpose"),
            ({"other": ("a", b"x")}, {"purpose": "batch"}, "file"),
            ([("file", ("a", b"x")), ("file", ("b", b"y"))], {"purpose": "batch"}, "file"),
            (
                {"file": ("a", b"x")},
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
                "expires_after.seconds",
            ),
            ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        ],
    )
    async def test_a_wrong_part_is_named_and_nothing_is_kept(
        self, http: httpx.AsyncClient, state: StateStore, files: Any, data: dict[str, str], param: str
    ) -> None:
        answer = await http.post("/v1/files", files=files, data=data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert kept_files(state) == []

    async def test_a_body_that_is_no_form_is_refused(self, http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/files", json={})).status_code == 415
        headers = {"content-type": "multipart/form-data"}
        answer = await http.post("/v1/files", content=b"x", headers=headers)
        assert (answer.status_code, "boundary" in answer.text) == (400, True)

    async def test_a_body_cut_short_is_refused_and_nothing_is_kept(
        self, http: httpx.AsyncClient, state: StateStore
    ) -> None:
        whole = http.build_request(
            "POST", "/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"}
        )
        body = whole.read()
        headers = {"content-type": whole.headers["content-type"]}
        answer = await http.post("/v1/files", content=body[:-8], headers=headers)
        assert (answer.status_code, "ends before" in answer.text) == (400, True)
        assert kept_files(state) == []

    async def test_too_large_a_file_is_refused_while_it_comes(self, state: StateStore) -> None:
        stage = Stage(state=state)
        stage.served_models.config = replace(stage.config, max_file_bytes=1000)
        async with stage.http() as http:
            assert (await upload(http, b"x" * 1000)).status_code == 200
            answer = await upload(http, b"x" * 1001)
            assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
        assert len(kept_files(state)) == 1

    async def test_no_more_is_kept_than_there_is_room_for(self, state: StateStore) -> None:
        stage = Stage(state=state)
        stage.served_models.config = replace(stage.config, max_stored_bytes=1500)
        async with stage.http() as http:
            assert (await upload(http, b"x" * 1000)).status_code == 200
            assert (await upload(http, b"x" * 1000)).status_code == 413
            assert (await upload(http, b"x" * 500)).status_code == 200

    async def test_a_full_disk_is_told_and_nothing_stays(
        self, http: httpx.AsyncClient, state: StateStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("ridgeline.server.batches.upload.os.fsync", full)
        answer = await upload(http)
        assert (answer.status_code, "No space left" in answer.text) == (500, True)
        assert kept_files(state) == []

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ({"limit": "0"}, "limit"),
            ({"limit": "many"}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "file-unknown"}, "after"),
            ({"colour": "red"}, "colour"),
        ],
    )
    async def test_a_wrong_query_is_named(
        self, http: httpx.AsyncClient, query: dict[str, str], param: str
    ) -> None:
        answer = await http.get("/v1/files", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    async def test_without_a_state_directory_there_are_no_files(self) -> None:
        async with Stage().http() as http:
            assert (await http.get("/v1/files")).status_code == 404


class TestMultipart:
    BODY = (
        b'preamble\r\n--B-1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--B-1\r\ncontent-disposition: form-data; name="file"; filename="a%22b.jsonl"\r\nX-Other: 1\r\n\r\n'
        b"one\r\n--B-\r\n--B\r\n\r\n--B-1\r\n"
        b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--B-1--\r\nepilogue'
    )

    def read(self, pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
        reader, parts = MultipartReader(b"B-1"), []
        for piece in pieces:
            for event in reader.feed(piece):
                match event:
                    case PartBegins(name, filename):
                        parts.append([name, filename, b""])
                    case PartData(data):
                        parts[-1][2] += data
                    case PartEnds():
                        parts[-1] = tuple(parts[-1])
        assert reader.done
        return parts  # type: ignore[return-value]

    def test_wherever_it_is_cut_the_parts_are_the_same(self) -> None:
        parts = [
            ("purpose", None, b"batch"),
            ("file", 'a"b.jsonl', b"one\r\n--B-\r\n--B\r\n"),
            ("empty", None, b""),
        ]
        assert self.read([self.BODY]) == parts
        assert self.read([self.BODY[i : i + 1] for i in range(len(self.BODY))]) == parts
        for cut in range(len(self.BODY)):
            assert self.read([self.BODY[:cut], self.BODY[cut:]]) == parts

    @pytest.mark.parametrize(
        "body",
        [
            b"x" * 9000,
            b"--B-1xx",
            b"--B-1\r\n\r\n",
            b"--B-1\r\nContent-Disposition: form-data\r\n\r\n",
            b"--B-1\r\n" + b"h" * 9000,
            b'--B-1\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 17,
        ],
    )
    def test_what_is_not_to_the_format_is_refused(self, body: bytes) -> None:
        with pytest.raises(BadRequest):
            list(MultipartReader(b"B-1").feed(body))

    def test_the_boundary_is_read_from_the_content_type(self) -> None:
        assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
        with pytest.raises(ApiError):
            boundary_of("multipart/form-data; boundary=" + "x" * 71)
