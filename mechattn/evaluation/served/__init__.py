"""Answers from a server: asked for in OpenAI's protocol, and compared with the model first."""
