"""The autograd functions of csrc/ops/autograd/derivatives.h in Python, for torch.func transforms (grad, jvp, ...).

torch refuses C++ autograd functions under transforms. _ops.py lists the derivatives of each operator, and
docs/derivative_formulas.md has the formulas. Calls without a transform do not use this file, because a Python autograd
function takes 30 us more.
"""

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from ._call import Call


class _Options(dict):
    """The options of an operator, and the operator, so that one set of autograd functions is enough for all operators.

    A plain dict is not possible: torch's pytrees flatten it, and then vmap of jvp miscounts its arguments.
    """

    def __init__(self, operator, values):
        super().__init__(values)
        self.operator = operator

    @property
    def gradients(self):
        return self.operator.gradients

    def with_grad_mask(self, wanted):
        return _Options(self.operator, self | {"grad_mask": list(wanted)})

    def without_grad_mask(self):
        return _Options(self.operator, {name: value for name, value in self.items() if name != "grad_mask"})


def _third_order(operator):
    return NotImplementedError(f"{operator.function}: its third derivative is not implemented")


def _jvp_of_jvp(operator):
    return NotImplementedError(
        f"{operator.function}: forward-mode AD of its forward-mode AD (jvp of jvp, jacfwd of jacfwd) is not "
        "implemented; torch.func.hessian and jvp of grad are"
    )


def _backward(x, out, lse, cotangents, wanted, options):
    """Computes B(X, c). None in c means zero."""
    if not any(wanted) or all(c is None for c in cotangents):
        return (None,) * options.gradients
    return _AttentionBackward.apply(options.with_grad_mask(wanted), *cotangents, *x, out, lse)


def _double_backward(x, out, lse, cotangents, tangents, output_tangents, wanted, options):
    """Computes H(X, c, t). ``output_tangents``: (t_out, t_lse)."""
    if not any(wanted) or all(c is None for c in cotangents) or all(t is None for t in tangents):
        return (None,) * options.gradients
    options = options.with_grad_mask(wanted)
    return _AttentionDoubleBackward.apply(options, *cotangents, *tangents, *x, out, lse, *output_tangents)


def _check_not_differentiated(operator, wanted):
    """Raises if a derivative of a tensor without derivatives is wanted.

    ``wanted``: a bool for each of these tensors.
    """
    for row, want in zip(operator.rows[operator.gradients :], wanted, strict=True):
        if want:
            raise ValueError(f"{row.name}: got a tensor that needs a gradient; allowed: one that does not")


def _add(a, b):
    return tuple(s if t is None else t if s is None else s + t for s, t in zip(a, b, strict=True))


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # from the rules of the operators, _vmap.py

    @staticmethod
    def forward(options, *tensors):
        return options.operator.forward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        # Both lists need the same tensors: vmap saves the batch dimensions of one list and uses them for both.
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        *x, out, lse = ctx.saved_tensors
        count = ctx.options.gradients
        _check_not_differentiated(ctx.options.operator, ctx.needs_input_grad[1 + count :])
        grads = _backward(x, out, lse, cotangents, ctx.needs_input_grad[1 : 1 + count], ctx.options)
        return (None, *grads, *[None] * (len(ctx.options.operator.rows) - count))

    @staticmethod
    def jvp(ctx, _, *tangents):
        x = ctx.saved_tensors[: len(ctx.options.operator.rows)]
        count = ctx.options.gradients
        _check_not_differentiated(ctx.options.operator, [t is not None for t in tangents[count:]])
        return _AttentionJvp.apply(ctx.options, *tangents[:count], *x)[2:]


class _AttentionBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return options.operator.backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *tangents):
        *cotangents, out, lse = (*ctx.saved_tensors[:2], *ctx.saved_tensors[-2:])
        x, options = ctx.saved_tensors[2:-2], ctx.options.without_grad_mask()
        if all(t is None for t in tangents):
            return (None,) * len(ctx.needs_input_grad)
        output_tangents = _AttentionJvp.apply(options, *tangents, *x)[2:]
        wanted = ctx.needs_input_grad[3 : 3 + options.gradients]
        grads = _double_backward(x, out, lse, cotangents, tangents, output_tangents, wanted, options)
        output_tangents = (
            m if needed else None for m, needed in zip(output_tangents, ctx.needs_input_grad[1:3], strict=True)
        )
        return (None, *output_tangents, *grads, *[None] * (len(options.operator.rows) - options.gradients), None, None)

    @staticmethod
    def jvp(ctx, _, *tangents):
        *cotangents, out, lse = (*ctx.saved_tensors[:2], *ctx.saved_tensors[-2:])
        x, options, wanted = ctx.saved_tensors[2:-2], ctx.options.without_grad_mask(), ctx.options["grad_mask"]
        of_cotangents, of_x = tangents[:2], tangents[2 : 2 + options.gradients]
        result = _backward(x, out, lse, of_cotangents, wanted, options)
        if any(t is not None for t in of_x):
            output_tangents = _AttentionJvp.apply(options, *of_x, *x)[2:]
            result = _add(result, _double_backward(x, out, lse, cotangents, of_x, output_tangents, wanted, options))
        return result


class _AttentionJvp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return options.operator.jvp(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *cotangents):
        count = ctx.options.gradients
        tangents, x = ctx.saved_tensors[:count], ctx.saved_tensors[count:-4]
        out, lse, *output_tangents = ctx.saved_tensors[-4:]
        needs = ctx.needs_input_grad[1:]
        of_tangents = _backward(x, out, lse, cotangents, needs[:count], ctx.options)
        wanted = needs[count : 2 * count]
        of_x = _add(
            _double_backward(x, out, lse, cotangents, tangents, output_tangents, wanted, ctx.options),
            _backward(x, out, lse, (grad_out, grad_lse), wanted, ctx.options),
        )
        return (None, *of_tangents, *of_x, *[None] * (len(ctx.options.operator.rows) - count))

    @staticmethod
    def jvp(ctx, *tangents):
        raise _jvp_of_jvp(ctx.options.operator)


class _AttentionDoubleBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return options.operator.double_backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[0]

    @staticmethod
    def backward(ctx, *tangents):
        raise _third_order(ctx.options.operator)

    @staticmethod
    def jvp(ctx, *tangents):
        raise _third_order(ctx.options.operator)


def run(call: Call):
    """Runs the call's operator; under a torch.func transform, by the autograd functions above."""
    if torch.compiler.is_compiling() or not active():  # torch.compile traces the operator itself
        return call.run()
    return _transformed(call)


def _transformed(call: Call):
    operator, tensors, options = call.operator, call.positional(), _Options(call.operator, call.options)
    stack = get_interpreter_stack()
    # functionalize differentiates nothing, and cannot functionalize the inside of an autograd function.
    functionalized = [interpreter.key() == TransformType.Functionalize for interpreter in stack]
    if all(functionalized):
        return call.run()
    if any(functionalized):
        raise NotImplementedError(
            f"{operator.function}: torch.func.functionalize around or inside another torch.func transform is not "
            "implemented, as torch's autograd functions have no rule for it; make_fx and torch.compile take "
            "torch.func.grad as it is"
        )
    if torch.is_autocast_enabled(tensors[0].device.type):
        tensors = [_autocast(t, row.autocast) for t, row in zip(tensors, operator.rows, strict=True)]
    if stack[-1].key() == TransformType.Jvp:  # out and its tangent in one pass
        x, tangents = zip(*(_unpacked(t) for t in tensors), strict=True)
        if any(t is not None for t in tangents):
            if [interpreter.key() for interpreter in stack].count(TransformType.Jvp) > 1:
                raise _jvp_of_jvp(operator)
            _check_not_differentiated(operator, [t is not None for t in tangents[operator.gradients :]])
            out, lse, t_out, t_lse = _AttentionJvp.apply(options, *tangents[: operator.gradients], *x)
            return forward_ad.make_dual(out, t_out), forward_ad.make_dual(lse, t_lse)
    return _Attention.apply(options, *tensors)


def _unpacked(t):
    return (None, None) if t is None else forward_ad.unpack_dual(t)


def cast_without_values(call: Call) -> Call:
    """Returns the call after autocast, for _explain.py. Tensors that autocast would convert have no values."""

    def form(t, row):
        if t is None:
            return None
        dtype = _autocast(t.new_empty(0), row.autocast).dtype
        return t if dtype == t.dtype else torch.empty_like(t, dtype=dtype)

    return call.with_tensors(**{row.name: form(call.tensors[row.name], row) for row in call.operator.rows})


def _autocast(t, action):
    """Casts as csrc/ops/keys/autocast.cpp (float64 stays), because a call under a transform skips the Autocast key."""
    if t is None or action == "keep" or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    if action == "unless_float32" and t.dtype == torch.float32:
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


# Returns whether a torch.func transform is being evaluated.
active = torch._C._are_functorch_transforms_active
