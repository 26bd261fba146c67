# Included where llama.cpp's own project begins: what makes it compile in a third of the time.
# Its tools' library is used by nothing of ours.
set(LLAMA_BUILD_COMMON OFF)
# Its 190 files, most of them small ones about one architecture, are compiled a dozen at a time.
cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
