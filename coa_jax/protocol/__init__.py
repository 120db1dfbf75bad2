"""The chain-of-agents language: roles, prompts, trajectories, tokens, automaton."""
