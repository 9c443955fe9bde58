"""One replica's HTTP face: OpenAI endpoints, validation, SSE, health, metrics, engine supervision.

A chat request's way, from the socket and back to it:

    http         uvicorn, whose every `connection` is bounded before it is a request
    app          the list of `endpoint`s; `front`: what all handlers need (settings, engines, figures)
    websocket    a message on a WebSocket is put to the gate as a request of its own
    gate         every request passes first and last: its id, its key, and every exception becomes an answer
    chat         reads the body (`exchange`) and makes a Job of it; `completions` does likewise
      decoding     bytes → the structs of `protocol`, or a 400 that names the field; `weight`: too much of it
      validation   options → SamplingParams; `prompts`: messages, text or ids → token ids that fit
    sse          the two kinds of answer, whole or streamed, both fed by one course
      course       the Job under way: the engine's chunks through an inbox, ended and booked once
      reader_watch cuts a stream whose reader takes nothing, or falls too far behind
      choices      chunks → pieces of numbered choices; usage, which `usage_book` keeps for a while
    chat         pieces → the structs of `bodies`, with `logprobs`; sse writes them to the socket

`errors` maps every exception to its answer; `openapi` describes the endpoints from their structs, whose
fields have the kinds and bounds of `field_types` and `limits`. `health` and `tokenize` are other endpoints;
`main` and `supervisor` start, watch and stop the engine. What is large (a body, log-probabilities) is read
and written off the event loop (`exchange.off_loop`), which carries everybody's streams.
"""
