"""The server's description of itself: an OpenAPI document and an HTML page of it.

`schemas` converts the structs that decode requests and encode answers to JSON Schema, `document` combines
them with the list of endpoints, `page` renders the document as HTML, `handlers` serves both. Nothing is
written twice: only a field of a struct can be in the document.
"""
