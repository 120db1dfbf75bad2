"""Hugging Face folders: config.json, names of arrays, safetensors, both ways."""
