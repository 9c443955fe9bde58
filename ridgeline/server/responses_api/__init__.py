"""/v1/responses: OpenAI's newer endpoint, on the same path from messages to tokens as chat.

`protocol` has the bodies clients send, `items` makes plain items of their input, `conversion` makes a chat
request of the items, `shape` writes the answer (with `growing` items and their events), `store` keeps it,
`background` runs requests without a connection, `handlers` combines these.
"""
