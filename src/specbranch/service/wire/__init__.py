"""The protocol between draft services and their clients: messages, payloads and addresses."""
