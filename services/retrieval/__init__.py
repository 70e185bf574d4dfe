"""External memory: documents, embeddings, search. Never touches KV."""
