"""What the server says about itself: its OpenAPI document, and a page of it to read.

`schemas` turns the structs that decode requests and encode answers into JSON Schema, `document` puts them and
the list of endpoints together, `page` writes the document as HTML, `handlers` serves both. Nothing is written
twice: a field that is not in a struct cannot be in the document.
"""
