"""What is learned before decoding starts: encoder, head, calibration, checkpoint."""
