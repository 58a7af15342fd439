"""What tests of several folders share, one module for each thing that it holds."""
