"""What requests may say, as pydantic models; `SamplingParams` checks ranges."""
