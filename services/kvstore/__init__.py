"""The kvstore: KV blocks below the device. Two tiers that are both LMDB, one on shared memory and one on NVMe."""
