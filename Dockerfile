# The quickstart in a container, from the root of the repository:
#   docker build -t coa-jax .
#   docker run --rm -v "$PWD/runs:/coa-jax/runs" coa-jax
# Any other program: docker run ... coa-jax experiments.sft --config=... --workdir=runs/...
FROM docker.io/library/python:3.11-slim

# A pid 1 that reaps the sandbox's processes.
RUN apt-get update && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /coa-jax
# EXTRA=[cuda12], [cuda13] or [tpu] for an accelerator.
ARG EXTRA=""
COPY pyproject.toml README.md LICENSE ./
COPY coa_jax coa_jax
COPY tools_sandbox tools_sandbox
RUN pip install --no-cache-dir -e ".${EXTRA}"
COPY configs configs
COPY experiments experiments

ENTRYPOINT ["tini", "--", "python", "-m"]
CMD ["experiments.quickstart", "--workdir=runs/quickstart"]
