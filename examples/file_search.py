"""An answer from a file, with citations: python examples/file_search.py

Needs a server with a chat model and an embedding model:  ridgeline serve smollm2-135m all-minilm-l6-v2
"""

from __future__ import annotations

import os

from openai import OpenAI

TEA = b"Green tea is not oxidised. Black tea is fully oxidised."


def main() -> None:
    url = os.environ.get("RIDGELINE_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RIDGELINE_API_KEY", "unused"))
    store = client.vector_stores.create(name="drinks")
    file = client.files.create(file=("tea.md", TEA), purpose="assistants")
    client.vector_stores.files.create(store.id, file_id=file.id, attributes={"year": 2026})

    for hit in client.vector_stores.search(store.id, query="Is black tea oxidised?"):
        print(f"{hit.score:.2f} {hit.filename}: {hit.content[0].text}")

    answer = client.responses.create(
        model="smollm2-135m",
        input="Is black tea oxidised?",
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        max_output_tokens=64,
    )
    print(answer.output_text)
    for item in answer.output:
        for part in item.content if item.type == "message" else ():
            for note in part.annotations if part.type == "output_text" else ():
                if note.type == "file_citation":
                    extra = note.model_extra or {}
                    print(f"  {note.filename} [{extra['begin']}:{extra['end']}] {extra['quote']!r}")
    client.vector_stores.delete(store.id)
    client.files.delete(file.id)


if __name__ == "__main__":
    main()
