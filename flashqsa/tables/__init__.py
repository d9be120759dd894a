"""Tuned configurations, one file per architecture; each entry says where its numbers came from."""
