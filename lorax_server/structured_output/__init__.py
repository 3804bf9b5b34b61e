"""Structured output: answers whose text has a form that the request asks for."""
