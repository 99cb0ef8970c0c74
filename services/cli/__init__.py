"""The kvmesh command: up, chat, status."""
