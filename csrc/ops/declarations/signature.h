// Makes structs and argument lists from the rows of a declaration (dense/attention.h).
//
// A row of a list of tensors is X(name, C++ type, shape, dtype, autocast, vmap). A row of a list of options is
// X(name, C++ type, default, check, allowed values). FA_TENSOR_FIELDS and FA_OPTION_FIELDS make the members of a struct
// from a list. The other functions here visit these members.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "argument_kinds.h"
#include "library.h"

namespace flash_attn_ext {

using OptionalTensor = std::optional<at::Tensor>;

template <class... T>
struct Types {};
template <class... T>
constexpr size_t count_of(Types<T...>) {
  return sizeof...(T);
}
template <class First, class... Rest>
Types<Rest...> without_first(Types<First, Rest...>);

template <class Function, class First, class... Rest>
[[gnu::always_inline]] inline decltype(auto) call_but_first(Function&& function, First&&, Rest&... rest) {
  return function(rest...);
}

// Each macro converts one row into a piece of a struct. A list has no commas between its rows. So a piece that needs a
// comma begins with one, and a dummy precedes the list.
#define FA_TENSOR_FIELD(name, type, ...) type name;
#define FA_OPTION_FIELD(name, type, default_value, ...) type name = default_value;
#define FA_TYPE(name, type, ...) , type
#define FA_NAME(name, ...) , name
#define FA_QUOTED_NAME(name, ...) #name,
#define FA_TENSOR_RULE(name, type, shape, dtype, autocast, vmap) \
  TensorRule{#name, shape, DtypeRule::dtype, AutocastRule::autocast, VmapRule::vmap},

// A list that can be derived is LIST(ROW, X): it calls ROW(X, name, type, ...) for each row. FA_SAME passes the row to X.
#define FA_SAME(X, ...) X(__VA_ARGS__)

// with_members(f) returns f(first member, second member, ...). A tuple of 40 references would do the same, but costs the
// compiler 10 CPU seconds. Inlined, it saves 0.5 us in a recorded call.
#define FA_WITH_MEMBERS(LIST)                                                     \
  template <class Function>                                                       \
  [[gnu::always_inline]] decltype(auto) with_members(Function&& function) {       \
    return call_but_first(function, 0 LIST(FA_NAME));                             \
  }                                                                               \
  template <class Function>                                                       \
  [[gnu::always_inline]] decltype(auto) with_members(Function&& function) const { \
    return call_but_first(function, 0 LIST(FA_NAME));                             \
  }
#define FA_MEMBERS(LIST)                                                    \
  using MemberTypes = decltype(without_first(Types<void LIST(FA_TYPE)>{})); \
  FA_WITH_MEMBERS(LIST)
// kRules holds map_rule(row) for each row: the same rows serve dense, packed and cached tensors.
#define FA_TENSOR_FIELDS(LIST, map_rule) \
  LIST(FA_TENSOR_FIELD)                  \
  FA_MEMBERS(LIST)                       \
  static constexpr auto kRules = mapped_rules({LIST(FA_TENSOR_RULE)}, map_rule);
#define FA_RESULT_FIELDS(LIST) \
  LIST(FA_TENSOR_FIELD)        \
  FA_MEMBERS(LIST)             \
  static std::string schema() { return tensor_list({LIST(FA_QUOTED_NAME)}); }
// check() throws ValueError for the first option with a value that its row does not allow: checks/options.cpp.
#define FA_OPTION_FIELDS(LIST)                                    \
  LIST(FA_OPTION_FIELD)                                           \
  FA_MEMBERS(LIST)                                                \
  static constexpr const char* kNames[] = {LIST(FA_QUOTED_NAME)}; \
  void check() const;

template <size_t n>
constexpr std::array<TensorRule, n> mapped_rules(const TensorRule (&rows)[n],
                                                 TensorRule (*map_rule)(TensorRule)) {
  std::array<TensorRule, n> rules{};
  for (size_t i = 0; i < n; ++i) rules[i] = map_rule(rows[i]);
  return rules;
}
constexpr TensorRule same_rule(TensorRule rule) { return rule; }

template <class Struct, class = void>
struct MemberNames {  // of a struct of options
  static constexpr const char* at(size_t n) { return Struct::kNames[n]; }
};
template <class Struct>
struct MemberNames<Struct, std::void_t<decltype(Struct::kRules)>> {  // of a struct of tensors
  static constexpr const char* at(size_t n) { return Struct::kRules.at(n).name; }
};

// The position of a tensor or an option in its struct, and so in the argument list. A name that is missing does not compile.
template <class Struct>
constexpr size_t position_of(std::string_view name) {
  size_t n = 0;
  while (MemberNames<Struct>::at(n) != name) ++n;
  return n;
}

inline const at::Tensor* tensor_or_null(const at::Tensor& t) { return t.defined() ? &t : nullptr; }
inline const at::Tensor* tensor_or_null(const OptionalTensor& t) { return t ? tensor_or_null(*t) : nullptr; }
inline OptionalTensor defined_or_none(const at::Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

// Calls visit(rule, member) for each tensor of a struct.
template <class Tensors, class Visit>
void for_each_tensor(Tensors&& tensors, Visit&& visit) {
  size_t n = 0;
  tensors.with_members([&](auto&... t) { (visit(std::decay_t<Tensors>::kRules[n++], t), ...); });
}

// The tensors of a struct, in order. An absent tensor is null.
template <class Tensors>
[[gnu::noinline]] auto pointers_to_tensors(const Tensors& tensors) {
  return tensors.with_members([](const auto&... t) { return std::array{tensor_or_null(t)...}; });
}

// Calls visit(rule, tensor) for each tensor that is present. In contrast to for_each_tensor(), the compiler has one copy of
// `visit` for a struct, not one copy for each member.
template <class Tensors, class Visit>
void for_each_present_tensor(const Tensors& tensors, const Visit& visit) {
  const auto pointers = pointers_to_tensors(tensors);
  for (size_t n = 0; n < pointers.size(); ++n)
    if (pointers[n]) visit(Tensors::kRules[n], *pointers[n]);
}

// For a struct with the members of a list and more. FA_PICK returns the members of the list as the list's own struct.
// FA_SET assigns them from that struct, which is named `given`.
#define FA_TO_PICKED(name, ...) picked.name = name;
#define FA_FROM_GIVEN(name, ...) name = given.name;
#define FA_PICK(Struct, LIST) \
  Struct picked;              \
  LIST(FA_TO_PICKED)          \
  return picked;
#define FA_SET(LIST) LIST(FA_FROM_GIVEN)

// The results in the text of a schema.

inline std::string tensor_list(size_t count) {
  std::string text;
  for (size_t n = 0; n < count; ++n) text += n ? ", Tensor" : "Tensor";
  return "(" + text + ")";
}
inline std::string tensor_list(std::initializer_list<const char*> names) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "Tensor " : ", Tensor ") + std::string(name);
  return "(" + text + ")";
}

// The number of members of a struct.
template <class Struct>
constexpr size_t kMembers = count_of(typename Struct::MemberTypes{});

// Members as IValues, in order. GCC must not inline the functions of one value: an operator has 20 values or more.

template <class T>
[[gnu::noinline]] void push_value(torch::jit::Stack& stack, const T& value) {
  stack.emplace_back(value);
}
template <class T>
[[gnu::noinline]] void load_value(const c10::IValue& from, T& value) {
  value = from.to<T>();
}

template <class Struct>
void push_members(torch::jit::Stack& stack, const Struct& from) {
  from.with_members([&](const auto&... value) { (push_value(stack, value), ...); });
}
template <class Struct>
void load_members(const c10::IValue* from, Struct& to) {
  to.with_members([&](auto&... value) { (load_value(*from++, value), ...); });
}

template <class Op>
using KernelOf = typename Op::Result(const typename Op::Tensors&, const typename Op::Options&);

template <class Op>
const c10::OperatorHandle& handle_of() {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string(FA_NAMESPACE_TEXT "::") + Op::kName).c_str(), "");
  return handle;
}

// Whether calls of an operator pass single arguments, not a stack of IValues: Op::kIsUnboxed. It saves 0.2 us
// a call, but the compiler needs 2 seconds for each of them. So only small calls' operators are unboxed.
template <class Op, class = void>
struct IsUnboxed : std::false_type {};
template <class Op>
struct IsUnboxed<Op, std::void_t<decltype(Op::kIsUnboxed)>> : std::bool_constant<Op::kIsUnboxed> {};

// An operator as a function of one stack.

template <class Op>
typename Op::Result call_boxed(const typename Op::Tensors& tensors, const typename Op::Options& options) {
  torch::jit::Stack stack;
  stack.reserve(kMembers<typename Op::Tensors> + kMembers<typename Op::Options>);
  push_members(stack, tensors);
  push_members(stack, options);
  handle_of<Op>().callBoxed(stack);
  typename Op::Result result;
  load_members(stack.data(), result);
  return result;
}

// The kernel is an argument, because all dispatch keys share this function.
template <class Op>
[[gnu::noinline]] void run_boxed(KernelOf<Op>* kernel, torch::jit::Stack* stack) {
  constexpr size_t kTensors = kMembers<typename Op::Tensors>,
                   kArguments = kTensors + kMembers<typename Op::Options>;
  const c10::IValue* arguments = stack->data() + (stack->size() - kArguments);
  typename Op::Tensors tensors;
  typename Op::Options options;
  load_members(arguments, tensors);
  load_members(arguments + kTensors, options);
  const typename Op::Result result = kernel(tensors, options);
  torch::jit::drop(*stack, kArguments);
  push_members(*stack, result);
}

template <class Op, KernelOf<Op>* kernel>
void boxed_kernel(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_boxed<Op>(kernel, stack);
}

// An operator as a function of single arguments.

template <class T>
struct ArgumentOf {
  using type = T;
};
template <>
struct ArgumentOf<at::Tensor> {
  using type = const at::Tensor&;
};
template <>
struct ArgumentOf<OptionalTensor> {
  using type = const OptionalTensor&;
};
template <class T>
using Argument = typename ArgumentOf<T>::type;

template <class Op, class = typename Op::Tensors::MemberTypes, class = typename Op::Options::MemberTypes,
          class = typename Op::Result::MemberTypes>
struct UnboxedOperator;

template <class Op, class... Tensor, class... Option, class... Output>
struct UnboxedOperator<Op, Types<Tensor...>, Types<Option...>, Types<Output...>> {
  using Result = typename Op::Result;
  using Flat = std::tuple<Output...>(Argument<Tensor>..., Argument<Option>...);

  static Result call(const typename Op::Tensors& tensors, const typename Op::Options& options) {
    static const auto op = handle_of<Op>().template typed<Flat>();
    Result result;
    result.with_members([&](auto&... output) {
      std::tie(output...) = tensors.with_members([&](const auto&... tensor) {
        return options.with_members([&](const auto&... option) { return op.call(tensor..., option...); });
      });
    });
    return result;
  }

  // `kernel` as a function of single arguments, which m.impl() takes.
  template <KernelOf<Op>* kernel>
  static std::tuple<Output...> flat(Argument<Tensor>... tensors, Argument<Option>... options) {
    Result result = kernel({tensors...}, {options...});
    return result.with_members([](auto&... output) { return std::tuple<Output...>(std::move(output)...); });
  }
};

// Calls an operator through the dispatcher. Op has kName, Tensors, Options and Result. The members of Result are the
// outputs in the schema.
template <class Op>
typename Op::Result call(const typename Op::Tensors& tensors, const typename Op::Options& options) {
  if constexpr (IsUnboxed<Op>::value)
    return UnboxedOperator<Op>::call(tensors, options);
  else
    return call_boxed<Op>(tensors, options);
}

}  // namespace flash_attn_ext
