"""Plugs FlashQSA into the engines people already run. Nothing is imported here: name the engine's own module."""
