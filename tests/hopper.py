"""Triton kernels compiled for a GPU that is not here."""


def compiled(kernel, types: dict[str, str], constants: dict, num_warps: int) -> str:
    """PTX of a `triton.jit` function for compute capability 9.0, which ptxas has accepted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert built.asm["cubin"]
    return built.asm["ptx"]
