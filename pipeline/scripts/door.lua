-- Shared by the scripts that admit requests; the loader puts it where they say `-- include: door.lua`.

-- The door closes at this part of the server's memory limit. What is inside goes on writing, and has the rest.
local MAX_FILLED = 0.8

-- Whether there is no room for one more request: max_queue of its priority are in front of prefill, or the memory
-- is filled. Looking costs 10 to 25 us, less than the rest of an admission.
local function is_closed(tokenizer, prefill, max_queue)
  -- Acknowledged entries are deleted, so the length is what waits and what is in work.
  if redis.call('XLEN', tokenizer) + redis.call('XLEN', prefill) >= max_queue then
    return true
  end
  local memory = redis.call('INFO', 'memory')
  local limit_bytes = tonumber(string.match(memory, '\nmaxmemory:(%d+)'))
  local used_bytes = tonumber(string.match(memory, '\nused_memory:(%d+)'))
  return limit_bytes > 0 and used_bytes > MAX_FILLED * limit_bytes
end

-- Lets a request be given up timeout_ms from now, whatever its state is then; 0 is never. The request remembers
-- where its deadline stands, so that its end takes it away (ending.lua). Its id is what follows in its key's name.
local function limit_time(request, deadlines, timeout_ms)
  if timeout_ms > 0 then
    local time = redis.call('TIME')
    local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('ZADD', deadlines, now_ms + timeout_ms, string.match(request, '^[^:]+:req:(.+)$'))
    redis.call('HSET', request, 'deadlines', deadlines)
  end
end
