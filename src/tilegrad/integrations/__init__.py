"""Other libraries' models by tilegrad's kernels: one module for each library, which it imports when it is called."""
