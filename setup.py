"""coa-jax: pip install -e '.[dev]'."""

import setuptools

setuptools.setup(
  name="coa-jax",
  version="0.1.0",
  description="Chain-of-Agents models in JAX: distil, fine-tune, reinforce, evaluate",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  # Programs and configs are run from a checkout; their names are too common to install.
  packages=setuptools.find_packages(include=("coa_jax*", "tools_sandbox*")),
  package_data={"coa_jax.report": ["static/*"]},
  install_requires=[
    "absl-py>=2.1",
    "bm25s>=0.2.10",
    "charset-normalizer>=3.4",  # pages that do not declare their encoding
    "docstring_parser>=0.16",  # --config.help
    "flax>=0.12",
    "fsspec>=2025.2",
    "grain>=0.2.12",
    "httpcore>=1.0",
    "httpx>=0.27",
    "jax>=0.10",
    "jinja2>=3.1",
    "lxml_html_clean>=0.4",
    "math-verify>=0.8",
    "matplotlib>=3.9",
    "ml-collections>=1.0",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11",
    "prometheus-client>=0.20",  # /metrics of tools_sandbox.service.server
    "pyarrow>=17",
    "pydantic>=2.7",  # bodies of HTTP requests, records in JSON
    "pyyaml>=6.0",  # what experiments.pod prints
    "rich>=13",
    "safetensors>=0.4.5",
    "starlette>=0.40",
    "sympy>=1.13",
    # Event files for TensorBoard: 0.6 MB, numpy and protobuf; tensorboard has 12 MB and
    # grpc, and its own writer is no public interface.
    "tensorboardX>=2.6.4",
    "tokenizers>=0.20",
    "trafilatura>=2.0",
    "transformers>=5.0",
    "uvicorn>=0.30",
  ],
  extras_require={
    "tpu": ["jax[tpu]>=0.10"],
    "cuda12": ["jax[cuda12]>=0.10"],
    "cuda13": ["jax[cuda13]>=0.10"],
    # Into an environment of its own (docs/vllm.md); spoken to over HTTP.
    "vllm": ["vllm>=0.32"],
    # Tools of MCP servers (config.tools.mcp); its clients speak to older servers too.
    "mcp": ["mcp>=2.0"],
    # Tasks and traces by URI (hf:NAME, tfds:NAME), and ArrayRecord:
    # coa_jax/tasks/rows.py, coa_jax/protocol/storage.py.
    "data": ["array_record>=0.8", "datasets>=4.0", "tensorflow-datasets>=4.9.9"],
    # Workdirs and inputs in buckets (gs://, s3://): coa_jax/bucket.
    "gcs": ["gcsfs>=2025.2"],
    "s3": ["s3fs>=2025.2"],
    # Where config.log.wandb_project asks for it.
    "wandb": ["wandb>=0.19"],
    "dev": [
      "array_record>=0.8",  # a kind of file that tests read
      "hypothesis>=6.100",
      "ipykernel>=6.29",
      "kubernetes-validate>=1.33",  # the schemas that manifests are held against
      "nbclient>=0.10",
      "nbformat>=5.10",
      "pytest>=8.3",
      "pytest-xdist>=3.8",
      "ruff>=0.8",
    ],
  },
)
