"""choose(): chooses the replica for a request. It changes no state: the caller charges the choice.

First the candidates: ready or ramping, with a recent report, not saturated, within the ramp, in an allowed
region; of these, those of the nearest region whose wait is not longer than the way to the next, and of the
version that is drawn by weight. Then the policy's cost, in seconds: the lowest wins; among nearly equal ones
the choice is random.

The default's cost of a replica, for a prompt of U tokens of which S are in its cache:

    wait_weight · token_s · (queued + U − S · (1 + waste) / (1 + excess) + last minute's work − own session)
    + output · running_s · 2 · max(requests, KV share · max_running)
    + an adapter to load + silence

The first line is the time to the first token: the prompts before this one and this one's own tokens delay it
alike, so that a prefix outweighs a queue that is shorter than it.

Why it is not worse than round-robin at light load: a prefix is worth only the tokens that it saves, while
every request that is already there costs what it slows this one plus what this one slows it (the factor
2). Replicas above the mean load get less credit for a prefix (excess), so a prefix that many prompts share
is soon copied to idle replicas instead of overloading one of them; if no request overlaps another, the work
of the last minute has the same effect. A prefix is worth more than its tokens (waste) only when prompts
wait everywhere: computing it again would delay all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.columns import Field, Flags, Floats, ModelColumns
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import Counts, PrefixMap
from ridgeline.fleet.routing.prompt import PromptView

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHARED, _TOKENS, _HEAT = range(3)  # in ModelColumns.means
_FIRST_S = 1e6  # outweighs every load
_MOST_DELAYED = 8.0
_HEAT_FLOOR = 4096.0  # tokens; smaller differences in recent work do not count


@dataclass(frozen=True, slots=True)
class Choice:
    replica_id: str
    reason: str  # for logs and headers: prefix, adapter, session, turn, load
    predicted_wait_s: float  # estimated seconds until the first token
    matched_blocks: int


def choose(
    book: LoadBook,
    prefixes: PrefixMap,
    prompt: PromptView,
    policy: Policy,
    rng: Random,
    now: float,
    exclude: Collection[str] = (),
) -> Choice | None:
    """None if every replica is saturated (hold the request), or there is none (`book.candidates` is 0).

    The caller charges the choice at once: `book.charge(choice.replica_id, prompt, choice.matched_blocks)` and
    `prefixes.routed(choice.replica_id, prompt.blocks, now)`.
    """
    columns = book.columns(prompt.model)
    if columns is None or not len(columns):
        return None
    may = _candidates(columns, prompt, policy, now, exclude)
    if not np.logical_or.reduce(may):
        return None
    if prompt.region:
        may = _in_one_region(columns, may, prompt.region, policy)
    if columns.is_split():
        may = _draw_version(columns, may, prompt.session, rng)
    matched = _matched(columns, prefixes, prompt, now)
    cost, tie = _cost(book, columns, prompt, policy, now, matched)
    np.putmask(cost, ~may, np.inf)
    (ties,) = (cost <= np.minimum.reduce(cost) + tie).nonzero()
    index = int(ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))])
    hit = int(matched[index]) if matched is not None else 0
    reason = _reason(book, columns, prompt, policy, index, hit)
    return Choice(columns.names[index], reason, _predicted_wait_s(book, columns, prompt, index, hit), hit)


def _candidates(
    columns: ModelColumns, prompt: PromptView, policy: Policy, now: float, exclude: Collection[str]
) -> Flags:
    may = columns.field(Field.OPEN) > 0
    for name in exclude:
        if name in columns.names:
            may[columns.names.index(name)] = False
    if prompt.only:
        may &= np.array([name == prompt.only for name in columns.names])
    if prompt.residency:
        may &= columns.allowed(prompt.residency)
    heard = columns.field(Field.HEARD)
    if np.minimum.reduce(heard) < now - policy.silent_s:
        heard_lately = may & (heard >= now - policy.silent_s)
        if heard_lately.any():
            may = heard_lately
    if columns.room:
        _apply_ramps(columns, may)
    requests = columns.field(Field.REQUESTS)
    may &= requests < columns.limits(policy.queue_share)
    may &= columns.field(Field.KV) < policy.kv_full
    backlog_s = columns.field(Field.BACKLOG_S)
    if np.maximum.reduce(backlog_s) > policy.queue_s:
        may &= (backlog_s <= policy.queue_s) | (requests < 1)
    return may


def _in_one_region(columns: ModelColumns, may: Flags, region: str, policy: Policy) -> Flags:
    """The candidates of the nearest region, or of another one where the wait and the way are shorter."""
    places = columns.places(region)
    if places is None:
        return may
    codes, distance_s = places
    wait_s = columns.field(Field.TOKENS) * columns.field(Field.TOKEN_S)
    wait_s += columns.field(Field.REQUESTS) >= columns.field(Field.MOST)  # about a second for a slot
    wait_s += distance_s + policy.region_s * (distance_s > distance_s.min())
    np.putmask(wait_s, ~may, np.inf)
    of_region: Flags = codes == codes[int(wait_s.argmin())]
    return may & of_region


def _apply_ramps(columns: ModelColumns, may: Flags) -> None:
    """A ramp leaves requests to proven peers; without such peers it does not apply."""
    ramping = [index for index in columns.room if may[index]]
    if len(ramping) < int(may.sum()):
        shared = columns.field(Field.SHARED)
        for index in ramping:
            may[index] = shared[index] < columns.room[index]


def _draw_version(columns: ModelColumns, may: Flags, session: str, rng: Random) -> Flags:
    """The candidates of one version, drawn by the replicas' weights. A session keeps its version."""
    _, codes, weights = columns.shares()
    shares = np.bincount(codes[may], weights[may])
    chance = crc32(session.encode()) / 2**32 if session else rng.random()
    drawn = int(np.searchsorted(np.cumsum(shares), chance * shares.sum(), side="right"))
    of_version: Flags = codes == drawn
    return may & of_version


def _matched(columns: ModelColumns, prefixes: PrefixMap, prompt: PromptView, now: float) -> Counts | None:
    """Blocks of the prompt in each replica's cache; None if no replica has any."""
    counts = prefixes.counts(prompt.blocks, now) if prompt.blocks else None
    if counts is None:
        return None
    return counts[columns.slots(prefixes)]


def _cost(
    book: LoadBook,
    columns: ModelColumns,
    prompt: PromptView,
    policy: Policy,
    now: float,
    matched: Counts | None,
) -> tuple[Floats, float]:
    """The cost of each replica in seconds, and the difference below which costs are equal."""
    name = policy.name
    if name == "round-robin":
        return columns.field(Field.TURN).copy(), 0.0  # the replica that was chosen the longest time ago
    if name == "sticky" and prompt.session:
        return -_affinity(columns, prompt.session).astype(np.float64), 0.0
    tokens = columns.field(Field.TOKENS) + prompt.tokens
    if name == "default":
        means = columns.means()
        if matched is not None and prompt.tokens:
            tokens -= _credit(columns, prompt, matched, means)
        tokens += _heat(book, columns, policy, now, means)
        if prompt.session:
            tokens[_own(columns, prompt.session)] -= policy.sticky_tokens
    token_s = columns.field(Field.TOKEN_S)
    tokens *= policy.wait_weight
    tokens *= token_s
    cost = columns.field(Field.DRAG_S) * (prompt.output_tokens or columns.output_tokens)
    cost += tokens
    silent_from = now - policy.stale_s
    heard = columns.field(Field.HEARD)
    if np.minimum.reduce(heard) < silent_from:
        cost += np.maximum(silent_from - heard, 0.0) + (heard < silent_from)
    if name == "default":
        if prompt.adapter:
            cost += policy.adapter_load_s * _lacks_adapter(book, columns, prompt.adapter)
    elif name == "prefix" and matched is not None:
        cost -= _FIRST_S * matched  # the longest match, whatever the load
    elif name == "lora" and prompt.adapter:
        cost += _FIRST_S * _lacks_adapter(book, columns, prompt.adapter)
    return cost, policy.tie_share * policy.wait_weight * float(token_s[0]) * max(prompt.tokens, 16)


def _credit(columns: ModelColumns, prompt: PromptView, matched: Counts, means: Floats) -> Floats:
    """Tokens that each replica's cache saves; fewer at replicas with more requests than the others."""
    waste = min(float(means[_TOKENS]) / max(prompt.tokens, 256), _MOST_DELAYED)
    full = prompt.tokens_per_block * (1.0 + waste)
    mean = float(means[_SHARED])
    slope = 1.0 / (full * (1.0 + mean / 4.0))
    divisor = columns.field(Field.SHARED) * slope  # (1 + excess) / full
    divisor += 1.0 / full - mean * slope
    np.maximum(divisor, 1.0 / full, out=divisor)
    return np.divide(matched, divisor, out=divisor)


def _heat(book: LoadBook, columns: ModelColumns, policy: Policy, now: float, means: Floats) -> Floats:
    """The cost of the last minute's work in tokens, limited to four times the mean above the mean."""
    scale = book.heat_scale(now)
    mean = scale * float(means[_HEAT])
    price = columns.field(Field.HEAT) * (policy.heat_tokens * scale / (mean + _HEAT_FLOOR))
    return np.minimum(price, policy.heat_tokens * (4.0 + mean / (mean + _HEAT_FLOOR)), out=price)


def _lacks_adapter(book: LoadBook, columns: ModelColumns, adapter: str) -> Floats:
    def made() -> Floats:
        return np.array([float(not book.rows[name].has_adapter(adapter)) for name in columns.names])

    return columns.cached(("adapter", adapter), columns.adapters_version, made)


def _affinity(columns: ModelColumns, session: str) -> npt.NDArray[np.uint64]:
    """Rendezvous hashing: all routers choose the same replica, and a lost replica moves only its sessions."""
    name = session.encode()
    mixed = columns.hashes ^ np.uint64(crc32(name) << 32 | crc32(name[::-1]))
    mixed *= _MIX
    return mixed


def _own(columns: ModelColumns, session: str) -> int:
    """The replica of the session."""
    return int(_affinity(columns, session).argmax())


def _reason(
    book: LoadBook, columns: ModelColumns, prompt: PromptView, policy: Policy, index: int, hit: int
) -> str:
    if policy.name == "round-robin":
        return "turn"
    if policy.name == "sticky" and prompt.session:
        return "session"
    if policy.name in ("default", "prefix") and hit:
        return "prefix"
    if policy.name in ("default", "lora") and prompt.adapter:
        row = book.row_at(columns, index)
        if row.has_adapter(prompt.adapter):
            return "adapter"
    return "load"


def _predicted_wait_s(
    book: LoadBook, columns: ModelColumns, prompt: PromptView, index: int, hit: int
) -> float:
    """Seconds until the first token: the prompts before it, and a free slot."""
    values = columns.values[:, index]
    cost = book.row_at(columns, index).cost
    wait = float(values[Field.TOKEN_S]) * (float(values[Field.TOKENS]) + prompt.uncached_tokens(hit))
    over = float(values[Field.REQUESTS]) - float(values[Field.MOST]) + 1
    if over > 0:
        step_s = cost.step_s + cost.running_s * float(values[Field.MOST])
        wait += over * cost.output_tokens * step_s / float(values[Field.MOST])
    return wait
