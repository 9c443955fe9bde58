"""/v1/responses: OpenAI's newer endpoint, over the same road from messages to tokens as chat.

`protocol` are the bodies clients send, `items` makes their input a list of plain items, `conversion` makes a
chat request of them, `shape` writes the answer down (with `growing` items, `telling` their events), `store`
keeps it, `background` runs what no connection waits for, `handlers` puts these together.
"""
