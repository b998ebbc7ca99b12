# The CPU image: the main job on the embedded default, evaluation, export.
# docker build -f docker/cpu.Dockerfile -t dare-lightning:cpu .
FROM python:3.11-slim-bookworm

# git: the commit is recorded with every run.
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# Dependencies first: a change of the code then leaves this layer alone.
WORKDIR /opt/dare-lightning
COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple torch
COPY . .
RUN pip install -c constraints.txt .

# Runs, the tracking store and downloaded checkpoints belong to the user, in folders to mount.
RUN useradd --create-home dare && mkdir -p /runs && chown dare /runs
USER dare
WORKDIR /runs
ENV HF_HOME=/runs/.huggingface
VOLUME /runs
ENTRYPOINT ["python", "-m", "dare_lightning"]
CMD ["fit", "run_root=/runs"]
