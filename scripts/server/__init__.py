"""The HTTP server: bodies into requests, outputs into answers, connections that come and go."""
