"""Chats with tools: how an answer spells calls, and how they are read back."""
