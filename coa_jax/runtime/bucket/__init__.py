"""Mirrors a workdir in a bucket (gs://, s3://), and fetches inputs from buckets."""
