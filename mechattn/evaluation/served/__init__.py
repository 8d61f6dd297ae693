"""Answers from a server with OpenAI's protocol, which is compared with the model first."""
