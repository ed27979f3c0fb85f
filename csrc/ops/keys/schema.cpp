// Tells the dispatcher the operators' names, arguments and defaults.
#include "../declarations/library.h"
#include "../operators.h"

namespace flash_attn_ext {
namespace {

// An argument in the text of a schema, such as {"Tensor?", "attn_mask", "=None"}.
struct ArgumentText {
  std::string type;
  const char* name;
  std::string default_value;
};

std::string type_text(const at::Tensor&) { return "Tensor"; }
std::string type_text(double) { return "float"; }
std::string type_text(int64_t) { return "int"; }
std::string type_text(const c10::SymInt&) { return "SymInt"; }
std::string type_text(bool) { return "bool"; }
template <class T>
std::string type_text(const std::optional<T>&) {
  return type_text(T()) + "?";
}
template <size_t n>
std::string type_text(const std::array<bool, n>&) {
  return "bool[" + std::to_string(n) + "]";
}

std::string default_text(const at::Tensor&) { return ""; }
std::string default_text(bool value) { return value ? "=True" : "=False"; }
std::string default_text(int64_t value) { return "=" + std::to_string(value); }
std::string default_text(const c10::SymInt& value) { return default_text(value.expect_int()); }
std::string default_text(double value) { return "=" + std::to_string(value); }
template <class T>
std::string default_text(const std::optional<T>& value) {
  return value ? default_text(*value) : "=None";
}
template <size_t n>
std::string default_text(const std::array<bool, n>&) {
  return "";  // no default: the caller must pass it
}

template <class T>
[[gnu::noinline]] void add_argument(std::vector<ArgumentText>& arguments, const char* name, const T& value) {
  arguments.push_back({type_text(value), name, default_text(value)});
}

template <class Struct>
std::vector<ArgumentText> arguments_of() {
  std::vector<ArgumentText> arguments;
  const Struct with_defaults{};
  size_t n = 0;
  with_defaults.with_members(
      [&](const auto&... value) { (add_argument(arguments, MemberNames<Struct>::at(n++), value), ...); });
  return arguments;
}

// The names of the arguments that an operator writes: Op::kWritten.
template <class Op, class = void>
struct WrittenBy {
  static std::vector<std::string> names() { return {}; }
};
template <class Op>
struct WrittenBy<Op, std::void_t<decltype(Op::kWritten)>> {
  static std::vector<std::string> names() { return {std::begin(Op::kWritten), std::end(Op::kWritten)}; }
};

// "name(Tensor query, ..., Tensor? attn_mask=None, *, float? scale=None, ...) -> ...". An optional tensor has a default
// if only optional tensors follow.
std::string schema(const std::string& name, std::vector<ArgumentText> tensors,
                   const std::vector<ArgumentText>& options, const std::vector<std::string>& written,
                   const std::string& results) {
  for (size_t n = 0; n < written.size(); ++n)
    for (ArgumentText& tensor : tensors)
      if (written[n] == tensor.name)
        tensor.type.insert(6, "(" + std::string(1, char('a' + n)) + "!)");  // after Tensor
  bool is_last = true;
  for (auto tensor = tensors.rbegin(); tensor != tensors.rend(); ++tensor) {
    is_last = is_last && !tensor->default_value.empty();
    if (!is_last) tensor->default_value.clear();
  }
  std::string text;
  for (const ArgumentText& t : tensors) text += t.type + " " + t.name + t.default_value + ", ";
  text += "*";
  for (const ArgumentText& o : options) text += ", " + o.type + " " + o.name + o.default_value;
  return name + "(" + text + ") -> " + results;
}

}  // namespace

FA_LIBRARY(m) {
  const auto define = [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    m.def(schema(Op::kName, arguments_of<typename Op::Tensors>(), arguments_of<typename Op::Options>(),
                 WrittenBy<Op>::names(), Op::Result::schema())
              .c_str());
  };
  for_each_operator(KernelOperators{}, define);
  for_each_operator(PythonKernelOperators{}, define);
  for_each_operator(CpuOperators{}, define);
  for_each_operator(CacheWriters{}, define);
  m.def(
      "dropout_mask(Tensor rng_state, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, "
      "float dropout_p, SymInt first_row=0) -> Tensor");
}

}  // namespace flash_attn_ext
