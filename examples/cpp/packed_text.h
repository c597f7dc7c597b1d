// SPDX-License-Identifier: Apache-2.0
/// Text files as rows of packed documents.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

/// A name, and documents: pieces of the text files below a folder.
struct Channel {
  std::string name;
  std::vector<std::string> documents;
};

/// Reads "name=folder". A document has at most `max_length` bytes. Throws std::runtime_error where there is no text.
Channel read_channel(const std::string& argument, std::size_t max_length);

/// One training step's input: T bytes, to be predicted from those before them in the same document.
struct PackedRow {
  std::vector<std::int64_t> tokens;   // [T]
  std::vector<std::int64_t> labels;   // [T]: the tokens, and -100 in the padding behind the last document
  std::vector<int> cu_seqlens = {0};  // [S + 1]
  std::vector<int> channels;          // [S]
};

/// Fills a row of `num_tokens` with documents of channels drawn at random.
PackedRow pack(const std::vector<Channel>& channels, std::size_t num_tokens, std::mt19937& random);
