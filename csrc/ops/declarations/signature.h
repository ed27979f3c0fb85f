// Makes schemas, structs and argument lists from the rows of a declaration (dense/attention.h).
//
// A row of a list of tensors is X(name, C++ type, shape, dtype, autocast, vmap). A row of a list of options is
// X(name, C++ type, default, check, allowed values). FA_TENSOR_FIELDS and FA_OPTION_FIELDS make the members of a struct
// from a list. The other functions here visit those members.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "argument_kinds.h"

namespace flash_attn_ext {

using OptionalTensor = std::optional<at::Tensor>;

template <class... T>
struct Types {};
template <class First, class... Rest>
Types<Rest...> without_first(Types<First, Rest...>);

template <class First, class... Rest>
auto tie_but_first(First&&, Rest&... rest) {
  return std::tie(rest...);
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

#define FA_MEMBERS(LIST)                                                    \
  using MemberTypes = decltype(without_first(Types<void LIST(FA_TYPE)>{})); \
  auto tie() { return tie_but_first(0 LIST(FA_NAME)); }                     \
  auto tie() const { return tie_but_first(0 LIST(FA_NAME)); }
// kRules holds map_rule(row) for each row: the same rows serve dense, packed and cached tensors.
#define FA_TENSOR_FIELDS(LIST, map_rule) \
  LIST(FA_TENSOR_FIELD)                  \
  FA_MEMBERS(LIST)                       \
  static constexpr auto kRules = mapped_rules({LIST(FA_TENSOR_RULE)}, map_rule);
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

// The position of a tensor in the struct, and so in the argument list. A name that is missing does not compile.
template <class Tensors>
constexpr size_t position_of(std::string_view name) {
  size_t n = 0;
  while (Tensors::kRules.at(n).name != name) ++n;
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
  std::apply([&](auto&... t) { (visit(std::decay_t<Tensors>::kRules[n++], t), ...); }, tensors.tie());
}

// For a struct with the members of a list and more. FA_PICK returns the members of the list as the list's own struct.
// FA_SET assigns them from that struct.
#define FA_PICK(Struct, LIST)                    \
  Struct picked;                                 \
  picked.tie() = tie_but_first(0 LIST(FA_NAME)); \
  return picked;
#define FA_SET(from, LIST) tie_but_first(0 LIST(FA_NAME)) = from.tie();

// The text of a schema.

inline std::string tensor_list(size_t count) {
  std::string text;
  for (size_t n = 0; n < count; ++n) text += n ? ", Tensor" : "Tensor";
  return "(" + text + ")";
}

template <class T>
struct SchemaType;
template <>
struct SchemaType<at::Tensor> {
  static std::string text() { return "Tensor"; }
};
template <>
struct SchemaType<double> {
  static std::string text() { return "float"; }
};
template <>
struct SchemaType<int64_t> {
  static std::string text() { return "int"; }
};
template <>
struct SchemaType<c10::SymInt> {
  static std::string text() { return "SymInt"; }
};
template <>
struct SchemaType<bool> {
  static std::string text() { return "bool"; }
};
template <class T>
struct SchemaType<std::optional<T>> {
  static std::string text() { return SchemaType<T>::text() + "?"; }
};
template <size_t n>
struct SchemaType<std::array<bool, n>> {
  static std::string text() { return "bool[" + std::to_string(n) + "]"; }
};

inline std::string schema_default(bool value) { return value ? "=True" : "=False"; }
inline std::string schema_default(int64_t value) { return "=" + std::to_string(value); }
inline std::string schema_default(const c10::SymInt& value) { return schema_default(value.expect_int()); }
inline std::string schema_default(double value) { return "=" + std::to_string(value); }
template <class T>
std::string schema_default(const std::optional<T>& value) {
  return value ? schema_default(*value) : "=None";
}
template <size_t n>
std::string schema_default(const std::array<bool, n>&) {
  return "";  // no default: the caller must pass it
}

// Whether an operator writes to some of its arguments. Op::kWritten names them.
template <class Op, class = void>
struct WritesArguments : std::false_type {};
template <class Op>
struct WritesArguments<Op, std::void_t<decltype(Op::kWritten)>> : std::true_type {};

// "name(Tensor query, ..., Tensor? attn_mask=None, *, float? scale=None, ...) -> ...". An optional tensor has a default
// if only optional tensors follow.
template <class Op>
std::string schema() {
  using Tensors = typename Op::Tensors;
  std::vector<std::string> words;
  for_each_tensor(Tensors{}, [&](const TensorRule& rule, const auto& t) {
    std::string type = SchemaType<std::decay_t<decltype(t)>>::text();
    if constexpr (WritesArguments<Op>::value)
      for (size_t n = 0; n < std::size(Op::kWritten); ++n)
        if (std::string(Op::kWritten[n]) == rule.name) type += "(" + std::string(1, char('a' + n)) + "!)";
    words.push_back(type + " " + rule.name);
  });
  for (size_t n = words.size(); n-- > 0 && words[n].find('?') != std::string::npos;) words[n] += "=None";
  words.push_back("*");
  size_t n = 0;
  typename Op::Options options;
  auto add = [&](const auto& value) {
    words.push_back(SchemaType<std::decay_t<decltype(value)>>::text() + " " + Op::Options::kNames[n++] +
                    schema_default(value));
  };
  std::apply([&](const auto&... value) { (add(value), ...); }, options.tie());
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return std::string(Op::kName) + "(" + text + ") -> " + Op::results();
}

// An operator as a function of single arguments, as the dispatcher calls it.

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

// Op has kName, results(), Tensors, Options and Result. Result::tie() is the tuple that the schema returns.
template <class Op, class = typename Op::Tensors::MemberTypes, class = typename Op::Options::MemberTypes,
          class = typename Op::Result::MemberTypes>
struct Operator;

template <class Op, class... Tensor, class... Option, class... Output>
struct Operator<Op, Types<Tensor...>, Types<Option...>, Types<Output...>> {
  using Result = typename Op::Result;
  using Kernel = Result(const typename Op::Tensors&, const typename Op::Options&);
  using Flat = std::tuple<Output...>(Argument<Tensor>..., Argument<Option>...);

  // Calls the operator through the dispatcher.
  static Result call(const typename Op::Tensors& tensors, const typename Op::Options& options) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow((std::string("flash_attn_ext::") + Op::kName).c_str(), "")
                               .template typed<Flat>();
    Result result;
    result.tie() = std::apply([](const auto&... argument) { return op.call(argument...); },
                              std::tuple_cat(tensors.tie(), options.tie()));
    return result;
  }

  // `kernel` as a function of single arguments, which m.impl() takes.
  template <Kernel* kernel>
  static std::tuple<Output...> flat(Argument<Tensor>... tensors, Argument<Option>... options) {
    Result result = kernel({tensors...}, {options...});
    return std::apply([](auto&... output) { return std::tuple<Output...>(std::move(output)...); },
                      result.tie());
  }
};

template <class Op>
typename Op::Result call(const typename Op::Tensors& tensors, const typename Op::Options& options) {
  return Operator<Op>::call(tensors, options);
}

// Registers `kernel` for the operator Op in the library `m`.
template <class Op, typename Operator<Op>::Kernel* kernel, class Library>
void implement(Library& m) {
  m.impl(Op::kName, &Operator<Op>::template flat<kernel>);
}

// Options as one IValue. autograd stores each entry of saved_data in a node of a hash table, so one entry is cheaper.

template <class Options>
c10::IValue pack_options(const Options& options) {
  return std::apply(
      [](const auto&... value) { return c10::ivalue::Tuple::create(std::vector<c10::IValue>{value...}); },
      options.tie());
}

template <class Options>
Options unpack_options(const c10::IValue& packed) {
  const std::vector<c10::IValue> values = packed.toTupleRef().elements().vec();
  Options options;
  size_t n = 0;
  auto load = [&](auto& value) { value = values[n++].template to<std::decay_t<decltype(value)>>(); };
  std::apply([&](auto&... value) { (load(value), ...); }, options.tie());
  return options;
}

}  // namespace flash_attn_ext
