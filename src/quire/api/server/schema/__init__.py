"""What requests may say, as pydantic models; ranges are `SamplingParams`' to check."""
