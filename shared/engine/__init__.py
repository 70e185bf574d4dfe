"""Running the model: paged KV, continuous batching, sampling. The only owner of torch and transformers."""

import os

# Before torch is imported anywhere. Compute threads that spin while they wait for each other slow a machine down several
# times as soon as two processes compute on it (a 128-token step: 2.1 s instead of 0.6 s); alone it makes no difference.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
