// SPDX-License-Identifier: Apache-2.0
#pragma once

// The one place where the version is written; CMake and setup.py read it from here.
#define SEGSCATTER_VERSION "0.1.0"
