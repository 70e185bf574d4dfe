"""Running the model: paged KV, continuous batching, sampling. The only owner of torch and transformers."""
