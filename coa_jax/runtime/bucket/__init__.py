"""Buckets (gs://, s3://): a workdir mirrored there, and inputs fetched from there."""
