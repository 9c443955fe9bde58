"""llama-server with its own n-gram speculation, of each kind and without, as the peer of speculation.py.

The servers run at the same time and are asked in turn; the speeds are those that llama-server reports of its
own decoding, without the prompt and without HTTP.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from versus.peer_llamacpp import LlamaCpp, Variant
from versus.rival_servers import Server, theirs

KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")
TIMEOUT_S = 600


class SpeculatingPeer:
    def __init__(self, peer: LlamaCpp, model: Path) -> None:
        """Starts all servers; `stop` ends them."""
        self._servers: dict[str, Server] = {}
        for kind in KINDS:
            flags = () if kind == "none" else ("--spec-type", kind)
            server = theirs(peer, model, Variant(model.stem, ("-np", "1", "-c", "4096", *flags)), slots=None)
            try:
                server.start()
            except BaseException:
                self.stop()
                raise
            self._servers[kind] = server

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    def rate(self, kind: str, prompts: list[list[int]], tokens: int, temperature: float) -> float:
        """Output tokens per second of decoding, over all prompts."""
        produced = seconds = 0.0
        for prompt in prompts:
            timings = self._complete(self._servers[kind].port, prompt, tokens, temperature)
            produced += timings["predicted_n"] - 1  # the first one comes with the prompt
            seconds += timings["predicted_ms"] / 1000
        return produced / seconds

    @staticmethod
    def _complete(port: int, prompt: list[int], tokens: int, temperature: float) -> dict[str, float]:
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": temperature,
            "seed": 1,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            timings: dict[str, float] = json.load(response)["timings"]
        return timings
