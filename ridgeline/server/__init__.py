"""One replica's HTTP interface: OpenAI endpoints, validation, SSE, health, metrics, engine supervision.

The path of a chat request, from the socket and back:

    http             uvicorn; each `connection` is bounded before it becomes a request
    app              the list of `endpoint`s; `served_models` has the engines, and settings and
                     metrics, for all handlers
    websocket        passes each WebSocket message to the gate as a separate request
    gate             first and last for every request: assigns the id, checks the key, turns exceptions into
                     error responses
    chat             reads the body (`read_body`) and makes a Job (`job`) of it, as `completions` does
      decoding         bytes → the structs of `protocol`, or a 400 naming the field; `weight` bounds values
      validation       options → SamplingParams; `prompts`: messages, text or ids → token ids that fit
    answer           the two kinds of answer, whole and streamed (SSE), both fed by one RunningRequest
      running_request  runs the Job: takes the engine's chunks from an inbox, books the request once
      submission       submits the Job's prompts to the engine, as many as can run together
      reader_watch     closes a stream whose client stops reading or falls too far behind
      pieces           chunks → pieces of numbered choices; usage, which `usage_book` keeps for a while
    chat             pieces → the structs of `bodies`, with `logprobs`; `answer` writes them to the socket

`errors` maps every exception to its response. `openapi` describes the endpoints from their structs, whose
fields take types and bounds from `field_types` and `limits`. `health` and `tokenize` are other endpoints.
`main` and `supervisor` start, watch and stop the engine. Large data (a body, log-probabilities) is read and
written in a thread (`off_loop`), because the event loop carries all streams.
"""
