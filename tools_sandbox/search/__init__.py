"""Search over a corpus: BM25 in process, or over the `/retrieve` API."""
