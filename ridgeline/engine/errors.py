"""The errors of the engine layer. The server maps each to an HTTP status in one table."""

GRAMMAR_FAULT = "the grammar "  # prefix of a reason that concerns the request's grammar
VIOLATION = "the answer does not match its schema"
EXIT_CANNOT_START = 3  # an engine process that printed a reason; a restart would not help


class EngineError(Exception):
    """Base of all errors that the engine reports to a client."""


class InvalidRequest(EngineError):
    """The request can never be served as it is. `field` names the part the client must change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class QueueFull(EngineError):
    """The waiting queue is full. The client should retry after `retry_after_s`."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full ({waiting} requests waiting); retry in {retry_after_s:.0f} s")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class EngineDied(EngineError):
    """The engine process ended while this request was open; its output so far is incomplete."""


class RequestFailed(EngineError):
    """This request failed inside the engine; no other request was affected."""


class SchemaViolation(RequestFailed):
    """The model's finished answer breaks a keyword of its schema that no grammar enforces."""


class GrammarTooComplex(RequestFailed):
    """The grammar could not be matched to the answer's end within the limits on one token's work."""


def failure(reason: str | None) -> RequestFailed:
    """The error of a request that the engine ended for this reason."""
    if reason is not None and reason.startswith(GRAMMAR_FAULT):
        return GrammarTooComplex(reason)
    if reason is not None and reason.startswith(VIOLATION):
        return SchemaViolation(reason)
    return RequestFailed(reason or "the engine gave no reason")


class InvalidConfig(EngineError):
    """A setting has an invalid value; the message names its flag."""


class BackendUnavailable(EngineError):
    """No backend can compute this model here; the message says what to install or change."""


class DeviceOutOfMemory(EngineError):
    """A step needs more memory than the device has left. The engine continues with smaller steps."""


class DeviceLost(EngineError):
    """The device no longer responds (a fault in a kernel or in the card): only a new process helps."""


class OutOfMemoryPlan(EngineError):
    """The memory plan does not fit; the message says which limit to lower."""
