"""The HTTP side of the server: OpenAI's protocol on one side, `EngineClient` on the other.

Receives HTTP requests, returns text; no torch and no transformers here. How tokens are made is
`moeserve.engine`'s business.
"""
