"""Files and batches as clients send and see them, in OpenAI's shapes; and one line of a batch's files."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ridgeline.server.http.body_fields import About, Body

DAY_S = 24 * 3600
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Purpose = Literal["batch", "batch_output", "user_data", "assistants", "fine-tune", "vision", "evals"]
UploadPurpose = Literal["batch", "user_data", "assistants", "fine-tune", "vision", "evals"]
Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "cancelling",
    "cancelled",
    "expired",
]
OVER: frozenset[Status] = frozenset({"completed", "failed", "cancelled", "expired"})

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ExpirySeconds = Annotated[int, Meta(ge=3600, le=30 * DAY_S)]


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, frozen=True):
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class LineError(msgspec.Struct, frozen=True):
    """Why a batch was not begun: what is wrong with which line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # from 1


class LineErrors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Of all lines that have an answer."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ExpiresAfter(Body, kw_only=True, frozen=True):
    anchor: Annotated[Literal["created_at"], About("the moment the time is counted from")]
    seconds: Annotated[ExpirySeconds, About("an hour to 30 days")]


class UploadForm(Body, kw_only=True, frozen=True):
    """The parts of an upload. The file itself is written to disk while it comes, and is not here."""

    purpose: Annotated[UploadPurpose, About("`batch` for a batch's input")]
    file: Annotated[str, About("the file; its name is kept"), Meta(extra_json_schema={"format": "binary"})]
    expires_after: Annotated[
        ExpiresAfter | None, About("as `expires_after[anchor]` and `expires_after[seconds]`; default 30 days")
    ] = None


class BatchRequest(Body, kw_only=True, frozen=True):
    input_file_id: Annotated[Id, About("an uploaded file of purpose `batch`: one request a line")]
    endpoint: Annotated[BatchEndpoint, About("what every line asks; each line's `url` must say the same")]
    completion_window: Annotated[Literal["24h"], About("what is not done by then expires")]
    metadata: Annotated[Metadata | None, About("up to 16 pairs, kept with the batch")] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, About("when the output files expire; default 30 days")
    ] = None


class FileQuery(Body, kw_only=True, frozen=True):
    limit: Annotated[int, About("most files in the answer"), Meta(ge=1, le=10_000)] = 10_000
    after: Annotated[Id | None, About("the id behind which the list goes on")] = None
    order: Annotated[Literal["asc", "desc"], About("by time of creation")] = "desc"
    purpose: Annotated[Id | None, About("only files of this purpose")] = None


class BatchQuery(Body, kw_only=True, frozen=True):
    limit: Annotated[int, About("most batches in the answer"), Meta(ge=1, le=100)] = 20
    after: Annotated[Id | None, About("the id behind which the list goes on")] = None


class Line(msgspec.Struct, frozen=True):
    """One line of a batch's input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """One line of a batch's output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: Failure | None
