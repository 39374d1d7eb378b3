#!lua flags=allow-oom
-- Commits transactions: guarantees for each one, alone and in order, that
--   * it happens as a whole or not at all: everything is checked before its first write;
--   * it happens only if its caller holds the entry, the request has not ended, and the attempt is current;
--   * sent again after a lost reply, it does not happen twice;
--   * a delta is appended only behind exactly the tokens it follows, and nothing follows a terminal entry;
--   * the credits of a pool never promise more bytes, nor to more requests, than they may, and each ends with its
--     request;
--   * when the request's plan and chunks become complete, decode gets one entry per (request, attempt), in
--     whichever call that is, whatever the order;
--   * once a request has ended, all that is left of it has a TTL.
-- A refused transaction does not touch the others.
--
-- KEYS  for each transaction: stream, claims, tries, request, results, chunks, then the keys of its effects
-- ARGV  consumer, commit (names this call), result_ttl_s, max_dead, dead_ttl_s, max_finished, number of transactions,
--       for each: group, id, nonce, request attempt, '1' to ack, number of effects, then each effect's name and
--       arguments
--         publish  KEYS stream                            ARGV payload
--         emit                                            ARGV delta, first_index, num_tokens
--         finish   KEYS finished log                      ARGV request id, terminal, state
--         chunk    KEYS decode interactive, decode batch, credits  ARGV index, ref, '1' for a substitute
--         plan     KEYS decode interactive, decode batch  ARGV request id, num_chunks, priority, payload
--         credit   KEYS credits                           ARGV request id, bytes, most bytes, most requests,
--                                                              lease_ms, handback consumer
--         give                                            ARGV request id
--         restart  KEYS returned stream                   ARGV request id, attempt, payload
--         dead     KEYS dead stream                       ARGV payload, reason
-- reply for each transaction an Outcome, or 'damaged: ' and what the server said
local consumer, commit, result_ttl_s, max_dead, dead_ttl_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local max_finished = ARGV[6]

-- include: held.lua
-- include: ending.lua

-- Reading ---------------------------------------------------------------------------------------------------

local k, a = 0, 6
local function key()
  k = k + 1
  return KEYS[k]
end
local function arg()
  a = a + 1
  return ARGV[a]
end

local function read_decode()
  local interactive = key()
  local batch = key()
  return { interactive = interactive, batch = batch }
end

local READ = {}
function READ.publish(e)
  e.stream = key()
  e.payload = arg()
end
function READ.emit(e)
  e.delta = arg()
  e.first = tonumber(arg())
  e.num = tonumber(arg())
end
function READ.finish(e)
  e.finished = key()
  e.request_id = arg()
  e.terminal = arg()
  e.state = arg()
end
function READ.chunk(e)
  e.decode = read_decode()
  e.credits = key()
  e.index = arg()
  e.ref = arg()
  e.substitute = arg() == '1'
end
function READ.plan(e)
  e.decode = read_decode()
  e.request_id = arg()
  e.num_chunks = arg()
  e.priority = arg()
  e.payload = arg()
end
function READ.credit(e)
  e.credits = key()
  e.request_id = arg()
  e.bytes = tonumber(arg())
  e.max_bytes = tonumber(arg())
  e.max_requests = tonumber(arg())
  e.lease_ms = tonumber(arg())
  e.handback = arg()
end
function READ.give(e)
  e.request_id = arg()
end
function READ.restart(e)
  e.stream = key()
  e.request_id = arg()
  e.attempt = arg()
  e.payload = arg()
end
function READ.dead(e)
  e.stream = key()
  e.payload = arg()
  e.reason = arg()
end

local function read_transaction(number)
  local t = { number = number, effects = {} }
  t.stream, t.claims, t.tries = key(), key(), key()
  t.request, t.results, t.chunks = key(), key(), key()
  t.group, t.id, t.nonce = arg(), arg(), arg()
  t.attempt = arg()
  t.ack = arg() == '1'
  for i = 1, tonumber(arg()) do
    local e = { kind = arg() }
    READ[e.kind](e)
    t.effects[i] = e
  end
  return t
end

-- Checking --------------------------------------------------------------------------------------------------

local function end_entry(t)
  drop(t.stream, t.claims, t.tries, t.group, t.id)
end

local function not_held(t)
  if #redis.call('XRANGE', t.stream, t.id, t.id) == 0 then
    return 'already'
  end
  return 'fenced'
end

-- The claim names the last call that made something under it, and which of its transactions those were, as
-- nonce:commit:1,2d,4 (2 was a duplicate). Sent again, that call finds its own name there, and what became of each.
local function is_of_this_call(t)
  local prefix = t.nonce .. ':' .. commit .. ':'
  return string.sub(t.claim, 1, #prefix) == prefix
end

local function sent_before(t)
  local how = is_of_this_call(t) and string.match(t.claim .. ',', '[:,]' .. t.number .. '(d?),')
  return how and (how == 'd' and 'duplicate' or 'ok')
end

local function note_made(t)
  local made = is_of_this_call(t) and t.claim .. ',' or t.nonce .. ':' .. commit .. ':'
  redis.call('HSET', t.claims, t.id, made .. t.number .. (t.duplicate and 'd' or ''))
end

-- A credit is `attempt:bytes` under the request's id. Until the prompt is computed, the stream and the id of the entry
-- follow, each behind a space: while nobody works on that entry, the credit is only kept warm. Else a prefill that was
-- killed would leave a credit that keeps others waiting who stand before its entry in the queue. Only prefill takes
-- credit, so the entry was delivered to the group of whoever asks.
local function is_idle(t, e, credit)
  local stream, id = string.match(credit, ' (%S+) (%S+)$')
  if not stream then
    return false
  end
  local pending = redis.pcall('XPENDING', stream, t.group, id, id, 1)
  local row = pending.err == nil and pending[1]
  return not row or row[2] == e.handback or row[3] >= e.lease_ms
end

-- Whether the request may have its credit; e.revoked are the idle ones that have to go for it.
local function has_room(t, e)
  local function fits(bytes, num)
    return bytes + e.bytes <= e.max_bytes and num + 1 <= e.max_requests
  end
  local bytes, num, idle_bytes = 0, 0, 0
  local idle = {}
  local credits = redis.call('HGETALL', e.credits)
  for i = 1, #credits, 2 do
    local id, credit = credits[i], credits[i + 1]
    local credit_bytes = tonumber(string.match(credit, '^%d+:(%d+)') or 0)
    if id == e.request_id then
      if credit_bytes >= e.bytes then -- it has what it asks for, however the bounds have changed
        return true
      end
    else
      bytes, num = bytes + credit_bytes, num + 1
      if is_idle(t, e, credit) then
        idle_bytes, idle[#idle + 1] = idle_bytes + credit_bytes, id
      end
    end
  end
  if fits(bytes, num) then
    return true
  end
  e.revoked = idle
  return fits(bytes - idle_bytes, num - #idle)
end

-- Returns an outcome if the transaction must not happen, and ends its entry where nobody can ever use it.
local function refusal(t)
  t.claim = held(t.stream, t.claims, t.group, t.id, t.nonce, consumer)
  if not t.claim then
    return not_held(t)
  end
  local outcome = sent_before(t)
  if outcome then
    return outcome
  end
  local request = redis.call('HMGET', t.request, 'state', 'attempt', 'n')
  if not request[1] or ENDED[request[1]] then
    end_entry(t)
    return 'gone'
  end
  if request[2] ~= t.attempt then
    if tonumber(t.attempt) < tonumber(request[2]) then
      end_entry(t) -- attempts only grow
    end
    return 'fenced'
  end
  t.n = tonumber(request[3])
  local n = t.n
  for _, e in ipairs(t.effects) do
    if e.kind == 'emit' then
      if e.first ~= n then
        return 'fenced'
      end
      n = n + e.num
    elseif e.kind == 'credit' and not has_room(t, e) then
      return 'full'
    end
  end
  return nil
end

-- Writing ---------------------------------------------------------------------------------------------------

-- The plan's payload is deleted when it is handed over, so it can be handed over once.
local function join(t, decode)
  local plan = redis.call('HMGET', t.request, 'plan:' .. t.attempt, 'plan_priority:' .. t.attempt,
    'plan_payload:' .. t.attempt)
  local num_chunks, priority, payload = tonumber(plan[1]), plan[2], plan[3]
  if not payload or redis.call('HLEN', t.chunks) < num_chunks then
    return
  end
  for index = 0, num_chunks - 1 do
    if redis.call('HEXISTS', t.chunks, index) == 0 then
      return
    end
  end
  redis.call('XADD', decode[priority], '*', 'p', payload)
  redis.call('HDEL', t.request, 'plan_priority:' .. t.attempt, 'plan_payload:' .. t.attempt)
end

local WRITE = {}
function WRITE.publish(t, e)
  redis.call('XADD', e.stream, '*', 'p', e.payload)
end
function WRITE.emit(t, e)
  t.n = t.n + e.num
  redis.call('XADD', t.results, '0-' .. t.n, 'p', e.delta)
  redis.call('HSET', t.request, 'n', t.n)
  -- Progress: what crashed a process before did not stop this one. Each reset takes at least one token.
  if redis.call('HGET', t.tries, t.id) ~= '1' then
    redis.call('HSET', t.tries, t.id, '1')
  end
end
function WRITE.finish(t, e)
  end_request({ id = e.request_id, request = t.request, results = t.results, chunks = t.chunks, attempt = t.attempt },
    e.terminal, e.state, e.finished, result_ttl_s, max_finished)
end
function WRITE.chunk(t, e)
  local home = redis.call('HGET', t.request, 'credits')
  if home and home ~= e.credits then -- it began again in another pool, and gets all its chunks there
    t.duplicate = true
  elseif not e.substitute then -- whoever comes later has it in better shape: its blob was lost, or it is sealed anew
    redis.call('HSET', t.chunks, e.index, e.ref)
  elseif redis.call('HSETNX', t.chunks, e.index, e.ref) == 0 then
    t.duplicate = t.duplicate or redis.call('HGET', t.chunks, e.index) ~= e.ref
  end
  join(t, e.decode)
end
-- From here on the request is in the hands of the stages behind prefill, and its credit counts whatever happens.
local function settle_credit(t, request_id)
  local credits = redis.call('HGET', t.request, 'credits')
  local credit = credits and redis.call('HGET', credits, request_id)
  if credit then
    redis.call('HSET', credits, request_id, string.match(credit, '^%d+:%d+'))
  end
end
function WRITE.plan(t, e)
  if redis.call('HSETNX', t.request, 'plan:' .. t.attempt, e.num_chunks) == 1 then
    redis.call('HSET', t.request, 'plan_priority:' .. t.attempt, e.priority,
      'plan_payload:' .. t.attempt, e.payload)
    settle_credit(t, e.request_id)
  end
  join(t, e.decode)
end
function WRITE.credit(t, e)
  local before = redis.call('HGET', t.request, 'credits')
  if before and before ~= e.credits then -- of another pool, in which it began
    redis.call('HDEL', before, e.request_id)
  end
  for _, id in ipairs(e.revoked or {}) do
    -- A holder that was away for a lease must not go on without credit: its blobs would have no owner.
    local stream, entry = string.match(redis.call('HGET', e.credits, id), ' (%S+) (%S+)$')
    redis.call('HDEL', stream .. ':claims', entry)
    redis.call('HDEL', e.credits, id)
  end
  redis.call('HSET', t.request, 'credits', e.credits)
  local plan = redis.call('HMGET', t.request, 'plan:' .. t.attempt, 'plan_payload:' .. t.attempt)
  if plan[1] and not plan[2] then -- decode has it already, under this attempt
    redis.call('HSET', e.credits, e.request_id, string.format('%s:%.0f', t.attempt, e.bytes))
    return
  end
  -- Whoever takes it begins the prompt: what an earlier holder left of this attempt is of no use.
  redis.call('DEL', t.chunks)
  redis.call('HDEL', t.request, 'plan:' .. t.attempt, 'plan_priority:' .. t.attempt, 'plan_payload:' .. t.attempt)
  redis.call('HSET', e.credits, e.request_id, string.format('%s:%.0f %s %s', t.attempt, e.bytes, t.stream, t.id))
end
function WRITE.give(t, e)
  local credits = redis.call('HGET', t.request, 'credits') -- it may be in another pool
  if credits then
    redis.call('HDEL', credits, e.request_id)
    redis.call('HDEL', t.request, 'credits')
  end
end
function WRITE.restart(t, e)
  redis.call('HSET', t.request, 'attempt', e.attempt)
  redis.call('HDEL', t.request, 'plan:' .. t.attempt, 'plan_priority:' .. t.attempt, 'plan_payload:' .. t.attempt)
  redis.call('DEL', t.chunks)
  local id = redis.call('XADD', e.stream, '*', 'p', e.payload)
  local credits = redis.call('HGET', t.request, 'credits')
  local credit = credits and redis.call('HGET', credits, e.request_id)
  if credit then
    local bytes = string.match(credit, '^%d+:(%d+)')
    redis.call('HSET', credits, e.request_id, string.format('%s:%s %s %s', e.attempt, bytes, e.stream, id))
  end
end
function WRITE.dead(t, e)
  redis.call('XADD', e.stream, 'MAXLEN', '~', max_dead, '*', 'p', e.payload, 'reason', e.reason,
    'stream', t.stream, 'entry', t.id, 'tries', redis.call('HGET', t.tries, t.id) or '0')
  redis.call('EXPIRE', e.stream, dead_ttl_s)
end

local function write(t)
  for _, e in ipairs(t.effects) do
    WRITE[e.kind](t, e)
  end
  if t.ack then
    end_entry(t)
  else
    note_made(t)
  end
  return t.duplicate and 'duplicate' or 'ok'
end

local function run(t)
  return refusal(t) or write(t)
end

-- After the checks only a foreign key under one of our names can make a write fail. That must not take the
-- other transactions with it.
local transactions, reply = {}, {}
for i = 1, tonumber(arg()) do
  transactions[i] = read_transaction(i)
end
for i, t in ipairs(transactions) do
  local ok, outcome = pcall(run, t)
  if not ok then
    outcome = 'damaged: ' .. (type(outcome) == 'table' and outcome.err or tostring(outcome))
  end
  reply[i] = outcome
end
return reply
