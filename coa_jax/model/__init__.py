"""The Qwen-style transformer and where its arrays live."""
