"""The only HTTP server: OpenAI and native turn APIs, server-sent events, keys, bounds."""
