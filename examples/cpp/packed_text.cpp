// SPDX-License-Identifier: Apache-2.0
#include "packed_text.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

Channel read_channel(const std::string& argument, std::size_t max_length) {
  const std::size_t equals = argument.find('=');
  if (equals == std::string::npos) throw std::runtime_error("a channel is name=folder, but is " + argument);
  Channel channel{argument.substr(0, equals), {}};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(argument.substr(equals + 1))) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());  // the same documents on every machine
  for (const std::filesystem::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (text.find('\0') != std::string::npos) continue;  // no text
    for (std::size_t begin = 0; begin < text.size(); begin += max_length) {
      channel.documents.push_back(text.substr(begin, max_length));
    }
  }
  if (channel.documents.empty()) throw std::runtime_error("no text for channel " + argument);
  return channel;
}

PackedRow pack(const std::vector<Channel>& channels, std::size_t num_tokens, std::mt19937& random) {
  const auto draw = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  PackedRow row;
  while (true) {
    const std::size_t channel = draw(channels.size());
    const std::vector<std::string>& documents = channels[channel].documents;
    const std::string& text = documents[draw(documents.size())];
    if (row.tokens.size() + text.size() > num_tokens) break;
    for (const unsigned char byte : text) row.tokens.push_back(byte);
    row.cu_seqlens.push_back(static_cast<int>(row.tokens.size()));
    row.channels.push_back(static_cast<int>(channel));
  }
  row.labels = row.tokens;
  row.tokens.resize(num_tokens, 0);
  row.labels.resize(num_tokens, -100);
  return row;
}
