// Checks that a list names all fields that a struct adds to its base. A structured binding cannot check this, because
// it does not allow a struct with fields in both the struct and its base.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace flash_attn_ext::cuda {

struct AnyField {
  template <class T>
  constexpr operator T() const;
};
template <std::size_t>
using AnyFieldAt = AnyField;

// Whether braces can initialise a T from a Base and n fields. This is possible if T has at least n fields.
template <class T, class Base, class Numbers, class = void>
struct HasFields : std::false_type {};
template <class T, class Base, std::size_t... n>
struct HasFields<T, Base, std::index_sequence<n...>,
                 std::void_t<decltype(T{std::declval<Base>(), AnyFieldAt<n>{}...})>> : std::true_type {};

template <class T, class Base, class... Fields>
constexpr bool are_all_fields(Fields T::*...) {
  constexpr std::size_t kCount = sizeof...(Fields);
  return HasFields<T, Base, std::make_index_sequence<kCount>>::value &&
         !HasFields<T, Base, std::make_index_sequence<kCount + 1>>::value;
}

}  // namespace flash_attn_ext::cuda
