"""One replica's HTTP interface: OpenAI endpoints, validation, SSE, health, metrics, engine supervision.

The path of a chat request, from the socket and back:

    http             uvicorn; each `connection` is bounded before it becomes a request
    app              the list of `endpoint`s; `front` holds settings, engines and metrics for all handlers
    websocket        passes each WebSocket message to the gate as a separate request
    gate             first and last for every request: assigns the id, checks the key, turns exceptions into
                     error responses
    chat             reads the body (`request_context`) and makes a Job of it, as `completions` does
      decoding         bytes → the structs of `protocol`, or a 400 naming the field; `weight` bounds values
      validation       options → SamplingParams; `prompts`: messages, text or ids → token ids that fit
    sse              the two kinds of answer, whole and streamed, both fed by one RunningRequest
      running_request  runs the Job: takes the engine's chunks from an inbox, books the request once
      reader_watch     closes a stream whose client stops reading or falls too far behind
      choices          chunks → pieces of numbered choices; usage, which `usage_book` keeps for a while
    chat             pieces → the structs of `bodies`, with `logprobs`; sse writes them to the socket

`errors` maps every exception to its response. `openapi` describes the endpoints from their structs, whose
fields take types and bounds from `field_types` and `limits`. `health` and `tokenize` are other endpoints.
`main` and `supervisor` start, watch and stop the engine. Large data (a body, log-probabilities) is read and
written in a thread (`request_context.off_loop`), because the event loop carries all streams.
"""
