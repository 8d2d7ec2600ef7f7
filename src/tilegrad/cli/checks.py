"""`tilegrad check` and `gradcheck`, which compare results, and `doctor`, which reports what this installation can run."""

from __future__ import annotations

import argparse

from .arguments import PRESETS, Commands, add_command


def _check_flash(args: argparse.Namespace) -> int:
    from ..specification.flash_cases import check_flash

    return 0 if check_flash(args.kernel, args.device, matrices=not args.brief) else 1


def _check_document(_args: argparse.Namespace) -> int:
    from ..specification.memory_table import document_table

    print(document_table())
    return 0


def _gradcheck(args: argparse.Namespace) -> int:
    from ..engine.gradcheck import LIMIT, check_attention, check_model, gradient_table
    from ..model.config import PRESETS as MODELS

    if args.preset is None and args.against == "autograd":
        raise ValueError(
            "against: got 'autograd' without --preset; accepted: 'differences', or 'autograd' with --preset"
        )
    if args.preset is not None and args.kernel is not None:
        raise ValueError(f"kernel: got {args.kernel!r} with --preset, whose kernels the tables choose; accepted: none")
    if args.preset is None:
        title, results = "Gradients of attention against float64 central differences", check_attention(args.kernel)
    else:
        against = "torch autograd" if args.against == "autograd" else "float64 central differences"
        title = f"Gradients of a small {args.preset} against {against}"
        results = check_model(MODELS[args.preset], against=args.against)
    print(f"{title}\n\n{gradient_table(results)}")
    failed = [r.tensor for r in results if not r.passed]
    print(f"\n{'FAIL: ' + ', '.join(failed) if failed else 'PASS'}: relative error at most {LIMIT:g}\n")
    return 1 if failed else 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(build=args.build, kernels=args.kernels)


def add_checks(commands: Commands) -> None:
    check = add_command(commands, "check", "compute the specification's examples and compare them with its numbers")
    checks = check.add_subparsers(metavar="WHAT", required=True)
    flash = add_command(checks, "flash", "the specification's two cases of the FlashAttention-2 backward", _check_flash)
    flash.add_argument("--kernel", metavar="NAME", help="run this kernel instead of the kernel that the table chooses")
    flash.add_argument("--device", default="cpu", help="where to run (default: %(default)s)")
    flash.add_argument("--brief", action="store_true", help="print only the comparison, not the matrices")

    text = "print the memory table of the specification's example model, with corrected numbers"
    add_command(checks, "document", text, _check_document)

    text = "check hand-derived gradients of attention, or of a whole model"
    gradcheck = add_command(commands, "gradcheck", text, _gradcheck)
    text = "check a small model of this preset (default: attention alone)"
    gradcheck.add_argument("--preset", choices=PRESETS, help=text)
    text = "what gradients are compared with (default: %(default)s)"
    gradcheck.add_argument("--against", choices=("differences", "autograd"), default="differences", help=text)
    text = "for attention: this kernel instead of the kernel that the table chooses"
    gradcheck.add_argument("--kernel", metavar="NAME", help=text)

    text = "report what this installation can run, and how to enable the rest"
    doctor = add_command(commands, "doctor", text, _doctor)
    doctor.add_argument("--build", action="store_true", help="compile the parts that are in C++ (needs a C++ compiler)")
    text = "list the kernels of every op: which one runs, and why others do not"
    doctor.add_argument("--kernels", action="store_true", help=text)
