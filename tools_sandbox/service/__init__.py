"""The pool over HTTP: the service, its queue and its clients."""
